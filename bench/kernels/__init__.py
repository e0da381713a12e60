"""Single kernels that others measured, priced by the machine files."""
