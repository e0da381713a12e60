"""What benches and tests share: seeded problems whose truth is known, and plans that move data."""
