"""Constraints on answers: requests for structured outputs are compiled to llguidance's grammars, or refused.

grammars.py has the entry points. A schema is read with exact numbers and walked (schema_tree.py): its switches
are refused and keys without effect reported, numbers get literals that the library reads right (schema_numbers.py) or
are written as texts of a grammar (exact_grammar.py), multiples are checked (merged_multiples.py), and values that could
not end are left out (endless.py, which reads grammars in Lark, too). byte_matcher.py tries a grammar without a model.
"""

from batchinfer.config.structured_outputs.grammars import grammar_of, problem_of, reason_of, warnings_of

__all__ = ["grammar_of", "problem_of", "reason_of", "warnings_of"]
