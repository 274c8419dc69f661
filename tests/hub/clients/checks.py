"""Runs the functions of a client whose names begin with `check_`, in their order."""


def run(functions):
    for name, function in functions.items():
        if name.startswith("check_"):
            print(name, flush=True)
            function()
