"""The suite ``join``: several files into one."""
