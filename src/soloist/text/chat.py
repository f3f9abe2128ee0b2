"""Renders a conversation to the prompt a model was trained on, with the model's own template.

The text equals what transformers' `apply_chat_template(tokenize=False)` gives, character by
character. Knows nothing of tokens: encode the prompt with `add_special_tokens=False`.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta

from soloist.errors import RequestError, TokenizerError
from soloist.files import is_there
from soloist.gguf.names import is_gguf
from soloist.text.bounded import is_bounded
from soloist.text.files import read_json, read_special_tokens, read_text
from soloist.text.jinja import Refusal, environment
from soloist.text.messages import Message, Tool, plain, plain_messages, plain_tools

# Stands for the end of the message to continue while the template runs. The last character tells
# whether the template trims what it prints.
_MARK = "CONTINUE_FINAL_MESSAGE_HERE "


class ChatTemplate:
    """The chat templates of one model.

    Attributes:
        source: of all templates, as it was given.
        is_bounded: whether rendering takes no more than what is rendered allows, whatever that is.
        variables: that the templates read, such as `messages` and `enable_thinking`.
        names: the templates there are; `default` is taken unless tools are given and there is a
            `tool_use`.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        file: str = "chat template",
    ) -> None:
        """Compile templates by name.

        Args:
            sources: template text by name.
            special_tokens: variables that templates see, such as `bos_token`.
            now: the clock behind `strftime_now`.
            file: where the templates are from, for errors.
        """
        self._file = file
        self.source = "\n".join(sources.values())
        self._special_tokens = dict(special_tokens or {})
        made = environment(now)
        self.is_bounded = all(is_bounded(made, source) for source in sources.values())
        self.variables = frozenset[str]().union(*(_variables(made, x) for x in sources.values()))
        self._templates = {
            name: _compile(made, source, f"{file}: chat template '{name}'")
            for name, source in sources.items()
        }

    @classmethod
    def from_folder(
        cls, path: Path, *, now: Callable[[], datetime] = datetime.now
    ) -> "ChatTemplate":
        """The templates of a model's folder or GGUF file.

        `chat_template.jinja` and `additional_chat_templates/*.jinja` go before `chat_template` in
        tokenizer_config.json, which is a text or a list of names and texts.
        """
        origin, sources = _read_sources(path)
        if not sources:
            raise TokenizerError(
                f"{path} has no chat template, so a conversation cannot be turned into a prompt",
                "use plain completion: this model continues text",
            )
        special_tokens = _special_texts(path)
        return cls(sources, special_tokens=special_tokens, now=now, file=str(origin))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates."""
        return tuple(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """The prompt for `messages`, special tokens included.

        Encode it with `add_special_tokens=False`: templates write the beginning-of-sequence token
        themselves, and a second one changes what models answer.

        Args:
            messages: objects with `role` and `content`, and whatever else the template reads.
            tools: JSON schemas of the functions the model may call.
            add_generation_prompt: end with the head of the assistant's answer; by default unless
                the final message is continued.
            continue_final_message: end within the final message, for the model to go on there.
            template: name of the template, by default chosen as `names` says.
            variables: further switches of the template, such as `enable_thinking`.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both true: a prompt ends "
                "either within the final message or with the head of a new one",
                "set only one of them",
            )
        name = self._chosen(template, with_tools=tools is not None)
        chat = plain_messages(messages)
        final_text = _mark_final(chat) if continue_final_message else ""
        prompt = self._run(
            name,
            messages=chat,
            tools=plain_tools(tools),
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            variables={key: plain(value, key) for key, value in variables.items()},
        )
        return _cut_at_mark(prompt, final_text) if continue_final_message else prompt

    def _chosen(self, name: str | None, *, with_tools: bool) -> str:
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"{self._file} has no chat template '{name}' (it has: {', '.join(self.names)})",
                "use one of its templates",
            )
        return name

    def _run(self, name: str, *, variables: Mapping[str, object], **given: object) -> str:
        # Templates may ask whether `documents` is given; there it is always defined, as null.
        context = {"documents": None, **self._special_tokens, **variables, **given}
        try:
            return self._templates[name].render(context)
        except Refusal as refusal:
            raise RequestError(
                f"the model's chat template refuses this conversation: {refusal.message}",
                "change the conversation as the template's message says",
            ) from refusal
        except (
            TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
            RecursionError,
        ) as error:  # fmt: skip
            raise RequestError(
                f"the model's chat template ({self._file}) fails on this conversation: {error}",
                "the template may need fields or variables that are not given; see the model's "
                "documentation",
            ) from error


def _variables(made: Environment, source: str) -> set[str]:
    """What a template reads and does not set itself."""
    try:
        return meta.find_undeclared_variables(made.parse(source))
    except TemplateError:  # compiling it says what is wrong
        return set()


def _compile(made: Environment, source: str, label: str) -> Template:
    try:
        return made.from_string(source)
    except TemplateSyntaxError as error:
        raise TokenizerError(
            f"{label} has a syntax error in line {error.lineno}: {error.message}",
            "download the file again",
        ) from error


def _special_texts(path: Path) -> dict[str, str]:
    if is_gguf(path):
        from soloist.text.gguf.vocabulary import read_vocabulary

        return read_vocabulary(path).special_texts
    return read_special_tokens(path).texts


def _read_sources(folder: Path) -> tuple[Path, dict[str, str]]:
    """The templates by name, and the file or folder they are from."""
    if is_gguf(folder):
        from soloist.text.gguf.vocabulary import read_templates

        return folder, read_templates(folder)
    file = folder / "chat_template.jinja"
    sources = {"default": read_text(file)} if is_there(file) else {}
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[extra.stem] = read_text(extra)
    if sources:
        return folder, sources
    file = folder / "tokenizer_config.json"
    given = read_json(file).get("chat_template")
    if given is None:
        return file, {}
    for entry in given if isinstance(given, list) else [{"name": "default", "template": given}]:
        match entry:
            case {"name": str(name), "template": str(source)}:
                sources[name] = source
            case _:
                raise TokenizerError(
                    f"{file}: field 'chat_template' is neither a text nor a list of names and "
                    "texts",
                    "download the file again",
                )
    return file, sources


def _mark_final(chat: list[dict[str, object]]) -> str:
    """Put the mark at the end of the final message's text; return the text without it."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(text := part.get("text"), str):
            part["text"] = text + _MARK
            return text
    raise RequestError(
        f"messages[{len(chat) - 1}] has no text to continue",
        "give its content as a text, or leave continue_final_message out",
    )


def _cut_at_mark(prompt: str, final_text: str) -> str:
    at = prompt.rfind(_MARK.strip())
    if at < 0 or final_text.strip() not in prompt:
        raise RequestError(
            "the chat template leaves out or rewrites the final message, so it cannot be continued",
            "end with another message, or leave continue_final_message out",
        )
    before = prompt[:at]
    return before if prompt.startswith(_MARK, at) else before.rstrip()
