"""The commands of `nopad`, one module each, and the options and loaders they share with recipes.

Nothing here loads torch or Transformers before it is called, so that `--help` is quick.
"""

from .load_pretrained import (
    add_chat_template_option,
    check_chat_template,
    checkpoint_path,
    has_weights,
    load_model,
    load_tokenizer,
    load_weights,
    model_errors,
    resolve_path,
    set_chat_template,
    short_error,
)
from .options import (
    HelpFormatter,
    add_data_options,
    add_length_options,
    add_model_argument,
    add_model_options,
    as_cli_message,
    attention_name,
    count,
    data_kwargs,
    length_kwargs,
    number_above_0,
    number_from_0,
    parser,
    positive,
)
from .terminal import printable, progress

__all__ = [
    "HelpFormatter",
    "add_chat_template_option",
    "add_data_options",
    "add_length_options",
    "add_model_argument",
    "add_model_options",
    "as_cli_message",
    "attention_name",
    "check_chat_template",
    "checkpoint_path",
    "count",
    "data_kwargs",
    "has_weights",
    "length_kwargs",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "model_errors",
    "number_above_0",
    "number_from_0",
    "parser",
    "positive",
    "printable",
    "progress",
    "resolve_path",
    "set_chat_template",
    "short_error",
]
