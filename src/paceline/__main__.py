"""``python -m paceline`` is ``paceline``, also where the command is not on the path."""

from .cli.app import main

if __name__ == "__main__":
    main()
