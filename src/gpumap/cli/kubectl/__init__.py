"""`kubectl gpumap`: the whole cluster through the API server, with the user's own kubectl and no server of ours."""
