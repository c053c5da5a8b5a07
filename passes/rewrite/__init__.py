"""One file per op kind: the node stays, its weight becomes this rank's shard, redistributions stand around it."""
