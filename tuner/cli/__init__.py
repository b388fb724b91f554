"""The command ``rooftune``: one thin module for each subcommand."""
