"""HTML pages, each in one file that needs no network. They have a light and a dark theme, and work on phones, with
keyboards and with screen readers."""
