"""``python -m deeppcr``: the command, where its script is not on the path."""

from deeppcr_command import main

if __name__ == "__main__":
    main()
