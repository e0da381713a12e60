"""Replays measured graphs."""
