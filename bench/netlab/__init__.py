"""A laboratory of hosts with a slow network on one Linux machine, in which predictions are measured."""
