"""`python -m difflora` is the `difflora` command."""

from difflora.cli import main

if __name__ == "__main__":
    main()
