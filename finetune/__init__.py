"""Training: the drawn world, the data, the stages and the loop."""

if __name__ != "apollo_cli.finetune":
    raise ImportError("this package is apollo_cli.finetune, not finetune")
