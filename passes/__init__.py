"""Graph in, graph out: finds sharded layers in `torch.fx` graphs and rewrites them. Imports nothing of `autoshard`."""
