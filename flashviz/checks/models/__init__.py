"""The formulas: one module an algorithm, found by the algorithm's name, with a function ``model(params)``.

``model`` gets a recording's params and returns ``{tensor: (elements read from HBM, elements written to it)}``.
"""
