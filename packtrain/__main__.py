"""`python -m packtrain` is the command `packtrain`."""

from packtrain.cli.main import main

if __name__ == "__main__":
    main()
