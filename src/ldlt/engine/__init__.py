"""The engine: free parameters to explicit weights for which the Lipschitz matrix inequality holds."""
