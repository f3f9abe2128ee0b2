"""Short requests that are read where they arrive: waking another process takes longer."""

from soloist.text.chat import ChatTemplate
from soloist.text.grammar import Grammars
from soloist.text.processor import Processor


class TakesLonger(Exception):
    """More than a time that the length of a text bounds."""


class QuickProcessor(Processor):
    """The part of a processor whose work is bounded by its input: no templates, no grammars.

    Args:
        whole: whose tokenizer it shares.
    """

    def __init__(self, whole: Processor) -> None:
        self.files, self.tokenizer = whole.files, whole.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """Not here.

        Raises:
            TakesLonger: always.
        """
        raise TakesLonger

    @property
    def grammars(self) -> Grammars:
        """Not here.

        Raises:
            TakesLonger: always.
        """
        raise TakesLonger
