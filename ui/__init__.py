"""The local chat: a page that shows what the model saw."""

if __name__ != "apollo_cli.ui":
    raise ImportError("this package is apollo_cli.ui, not ui")
