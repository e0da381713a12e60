"""What a plan predicts, compared with what the frameworks' own compilers make of it: bytes, memory, numbers."""
