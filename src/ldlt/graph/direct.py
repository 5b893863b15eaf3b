def known_graph(module, shape): return None
