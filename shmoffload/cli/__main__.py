"""``python -m shmoffload.cli``: the command line without an installed script."""

from shmoffload.cli import main

if __name__ == "__main__":
    main()
