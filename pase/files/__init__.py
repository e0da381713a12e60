"""What every file needs: written whole or not at all, sizes as people write them, typed JSON and TOML."""
