"""Files of traces, read and written."""
