"""The `giveway` command, one file per subcommand, each loaded only when it is called."""
