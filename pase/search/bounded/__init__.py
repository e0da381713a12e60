"""The search in bounded memory."""
