"""Released decoders, as their own packages build them, in small sizes."""

from __future__ import annotations
