"""Support for files: atomic writes, sizes as people write them, typed JSON and TOML."""
