"""What grammars cost: compiling them, and masks of tokens; llguidance and xgrammar side by side."""
