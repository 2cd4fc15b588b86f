"""How the worker processes of a run are started: a class for each kind of cluster, named by ``conf/cluster/*.yaml``."""
