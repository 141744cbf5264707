"""One worker per engine. Each runs in that engine's own environment, so it may import nothing of GiveWay's."""
