"""Pages of HTML: one file each, no network, light and dark, for phones, keyboards and screen readers."""
