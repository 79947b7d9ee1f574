"""Texts on which tokenizers tend to differ."""

TEXTS = [
    "",
    " ",
    "Hello world, don't you'll WE'VE",
    "  two  spaces and   three",
    "12345 and 3.14 and 1,000",
    "日本語テキスト 漢字 한국어",
    "emoji 😍🙏👨‍👩‍👧 ok",
    "tab\tnew\n\n\nline\r\nend  \n ",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|endoftext|> x <|im_end|>",
    "é e\u0301 Ⅷ ² ½ ١٢٣ ǅ ß",
    "a" * 300 + " " * 70,
    "\x00\x01\x7f\u200b\ufeff\u2028",
    "Привет мир! Γειά σου",
    "def f(x):\n    return x**2  # ok\n\n",
    "<0x41> <s> </s> <unk> \u2581\u2581x",
]
