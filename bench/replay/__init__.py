"""How far replays and what-ifs of traces can be trusted, and how fast they are."""
