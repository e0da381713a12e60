"""Audits of predictions against the frameworks' own compilers: bytes, memory, numbers."""
