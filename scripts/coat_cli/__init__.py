"""The subcommands of ``coat-vlm``: arguments in, one call into the room that does the work."""
