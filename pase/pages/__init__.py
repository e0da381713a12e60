"""HTML pages, each in one file that needs no network. They have light and dark themes, and work on phones, with keyboards
and with screen readers."""
