"""From a name or a folder to a model in memory."""

if __name__ != "apollo_cli.weights":
    raise ImportError("this package is apollo_cli.weights, not weights")
