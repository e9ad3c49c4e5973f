"""`penstock doctor`: the examination of a deployment and its run, with advice."""
