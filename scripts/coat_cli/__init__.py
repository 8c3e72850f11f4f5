"""The subcommands of ``coat-vlm``: they parse arguments and call the package that does the work."""
