"""The `lingpt` command: one file per verb, imported only when that verb is called."""
