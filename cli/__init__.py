"""The `lingpt` command: a file a verb, each imported only when its verb is asked for."""
