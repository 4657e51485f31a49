"""What of a conversation is trained, for templates of the kinds that models have, and tokenizers that merge."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hyper_parallel.data import ByteTokenizer, ChatTemplate, FileTokenizer, load_chat_template
from hyper_parallel.data.preparing.chat import CHATML, trained_tokens

only_on = "torch"  # imports no framework: once is enough

_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Tschüß!"},
]
_MARKED = (
    "{{ bos_token }}{%- for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_STRIPPING = (  # the last answer keeps its thoughts, earlier ones lose them
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('|')[-1] }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _trained_texts(template, messages):
    text, spans = template.render_trained(messages)
    return [text[start:end] for start, end in spans]


def test_answers_with_their_ends_are_trained_and_nothing_else():
    template = ChatTemplate(CHATML)
    assert _trained_texts(template, _TALK) == ["Hello.<|im_end|>\n", "Tschüß!<|im_end|>\n"]
    assert template.render(_TALK[:2], add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_marks_answers_says_the_same():
    template = ChatTemplate(_MARKED, bos="<s>", eos="</s>")
    assert template.render(_TALK[:3]) == "<s>[system]Be brief.[user]Hi[assistant]Hello.</s>"
    assert _trained_texts(template, _TALK) == ["Hello.</s>", "Tschüß!</s>"]


def test_tools_of_a_row_are_rendered():
    template = ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    text, ((start, end),) = template.render_trained(_TALK[:3], tools=[{"name": "né"}])
    assert text.startswith('[{"name": "né"}]<|im_start|>')
    assert text[start:end] == "Hello.<|im_end|>\n"


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_shows_where():
    template = ChatTemplate(_STRIPPING)
    talk = [{"role": role, "content": text} for role, text in (("user", "1?"), ("assistant", "hm|1."), ("user", "2?"))]
    assert _trained_texts(template, talk[:2]) == ["hm|1.;"]
    with pytest.raises(
        ValueError,
        match=r"message 1: the messages up to and with it are not rendered as the beginning of the whole conversation, "
        r".* at character 20 it has '<user>1\?;<assistant>hm\|1\.;', the whole '<user>1\?;<assistant>1\.;.*",
    ):
        template.render_trained(talk)


def test_a_generation_prompt_that_is_no_beginning_of_the_answer_is_an_error():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}AI:{% endif %}"
    )
    with pytest.raises(
        ValueError, match="message 1: the messages before it, with the generation prompt, are not rendered"
    ):
        template.render_trained([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "is no Jinja template: line 1"),
        ("{{ raise_exception('roles must alternate') }}", "cannot render these messages: roles must alternate"),
        ("{{ nothing.there }}", "cannot render these messages: 'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "cannot render these messages: can only concatenate str"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render these messages: .*unsafe"),
        ("{{ messages.append(1) }}", "cannot render these messages: .*unsafe|not safely callable"),
    ],
)
def test_bad_templates(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(_TALK)


def test_bytes_of_answers_are_trained():
    tokenizer = ByteTokenizer()
    text, spans = ChatTemplate(CHATML).render_trained(_TALK)
    ids, trained, straddling = trained_tokens(tokenizer, text, spans)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[trained]) == "Hello.<|im_end|>\nTschüß!<|im_end|>\n"
    assert straddling == 0


def make_tokenizer(folder, *, chat_template=None, eos="<|im_end|>"):
    """A byte-level BPE of a few merges with ChatML's special tokens, in Hugging Face's files."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False
    )
    made.train_from_iterator(["Hello there, hello. The answer: the answer is the answer."] * 4, trainer)
    made.enable_truncation(3)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": eos}, "bos_token": None}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tokens_of_a_tokenizer_file(tmp_path):
    tokenizer = FileTokenizer(make_tokenizer(tmp_path))
    text, spans = ChatTemplate(CHATML).render_trained(_TALK)
    ids, trained, straddling = trained_tokens(tokenizer, text, spans)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[trained]) == "Hello.<|im_end|>\nTschüß!<|im_end|>\n"
    assert (
        ids[trained] == tokenizer.eos_id
    ).sum() == 2  # the end of a turn is trained, though it may be the padding too
    assert straddling == 0
    assert len(ids) < len(text)
    assert tokenizer.vocab_size > max(ids)
    assert FileTokenizer(tmp_path / "tokenizer.json").identity == tokenizer.identity
    (document,) = tokenizer.documents(["Hello there"])
    assert tokenizer.decode(document) == "Hello there<|im_end|>"


def test_a_token_across_the_boundary_is_trained_and_counted(tmp_path):
    tokenizer = FileTokenizer(make_tokenizer(tmp_path))
    text = "The answer: the answer"
    ids, trained, straddling = trained_tokens(
        tokenizer, text, [(13, len(text))]
    )  # " the" begins with the prompt's space
    assert straddling == 1
    assert tokenizer.decode(ids[trained]) == " the answer"
    assert np.flatnonzero(trained)[0] > 0


def test_where_templates_come_from(tmp_path):
    folder = make_tokenizer(
        tmp_path, chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": "d"}]
    )
    assert load_chat_template(None, FileTokenizer(folder)).source == "d"
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_chat_template(None, FileTokenizer(folder)).source == "from the file"
    assert load_chat_template("chatml", FileTokenizer(folder)).source == CHATML
    (tmp_path / "own.jinja").write_text("own")
    assert load_chat_template(str(tmp_path / "own.jinja"), ByteTokenizer()).source == "own"
    assert load_chat_template(None, ByteTokenizer()).source == CHATML
    assert load_chat_template("none", ByteTokenizer()) is None


def test_mistakes_with_tokenizers(tmp_path):
    folder = make_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r'has no chat template .* write chat_template = "chatml"'):
        load_chat_template(None, FileTokenizer(folder))
    with pytest.raises(ValueError, match=r"cannot read the chat template 'chatlm'.*.chatml. is built in"):
        load_chat_template("chatlm", FileTokenizer(folder))
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer '.*nowhere'; give a tokenizer.json, a folder"):
        FileTokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: this is no tokenizer of the `tokenizers` library"):
        FileTokenizer(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: this is no JSON"):
        FileTokenizer(tmp_path)
