"""Short requests that are read where they arrive: waking another process takes longer.

Templates and grammars are imported with this file, so that no stream waits for that at a request.
"""

from soloist.errors import TokenizerError
from soloist.text.chat import ChatTemplate
from soloist.text.grammar import Grammars
from soloist.text.processor import Processor


class TakesLonger(Exception):
    """More than a time that the length of a text bounds."""


class QuickProcessor(Processor):
    """The part of a processor whose work is bounded by its input: no grammars, few templates.

    Attributes:
        renders: whether the model's template is one of these.

    Args:
        whole: whose tokenizer it shares.
    """

    def __init__(self, whole: Processor) -> None:
        super().__init__(whole.files, whole.tokenizer)
        self._whole = whole
        try:
            self.renders = whole.chat_template.is_bounded
        except TokenizerError:  # there is none
            self.renders = False

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's own.

        Raises:
            TakesLonger: it may take more than its input allows.
        """
        if not self.renders:
            raise TakesLonger
        return self._whole.chat_template

    @property
    def grammars(self) -> Grammars:
        """Not here.

        Raises:
            TakesLonger: always.
        """
        raise TakesLonger
