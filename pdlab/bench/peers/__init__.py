"""Who takes part in `pdlab bench`: a module for each engine, all driven by the same few lines.

Each runs in a process of its own, in an environment of its own, where pdlab need not be installed:

    OTHER_PYTHON pdlab/bench/peers/start.py llama_cpp

A module has `open_peer(asked)`, which loads a model and warms up, and gives a `Peer`; `serve.py`
reads questions from stdin and answers on stdout, both JSON, one a line. Peers import what they
measure by name (`import_module`), because none of it is a dependency of pdlab.
"""
