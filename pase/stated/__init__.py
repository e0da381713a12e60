"""Strategies that people state, priced as the program runs them: collectives, overlap, recomputation, memory."""
