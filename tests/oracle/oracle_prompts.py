"""Prompts for the greedy oracle: the kinds of rows that people put into a prompts file.

CHATS are rendered with the model's chat template; RAW prompts are tokenised as they stand.
Each entry is named, so that a failing row says what it is about.
"""

LABELS = (
    "You sort customer messages. Answer with exactly one word: billing, delivery, fault, praise or other. "
    "Use billing for anything about money, delivery for anything about parcels, fault for a thing that does not work."
)

REPORT = """The harbour of Lindvik was dredged for the first time in 1871, when the old timber quay could no longer take the steamers that \
carried salted herring to the south. The town council of the day borrowed eleven thousand crowns, a sum so large that the treasurer, \
a schoolmaster called Anton Berg, asked for a second signature on every receipt. The work took two summers. Forty men came from the \
inland parishes, and slept in a sail loft above the cooperage; three of them married in the town and stayed.

The new basin was five metres deep at low water and had room for nine vessels. Within ten years the export of herring had doubled, \
and a second trade, in birch bark and tar, had grown up beside it. The council used the harbour dues to pay for a school with four \
rooms, a fire engine drawn by two horses, and a lamp at the end of the mole. The lamp burned whale oil until 1889 and paraffin after \
that. Its keeper was paid in firewood and was forbidden to leave the town between October and March.

In February 1903 a storm from the north-west broke the mole in three places. The council minutes give the damage as 4,260 crowns, and \
note that two fishing boats, the Freya and the Good Intent, were lost at their moorings. No one drowned. The repair was delayed for \
two years by a quarrel over stone: the contractor had promised granite from the quarry at Holm, but delivered slate, which split in \
the first frost. A court in the county town decided for the council in 1904, and the granite came the next spring.

The railway arrived in 1911 and took the passengers first, then the mail, and in the end most of the freight. By 1930 only four \
vessels still called every week. The cooperage closed, and the sail loft became a dance hall. During the war the basin was used by \
minesweepers, and a concrete shed was built for their gear; it still stands, and holds the rowing club today. The dredging of 1958 was \
the last that the town paid for alone. Since then the state has kept the depth at six metres, and the town has kept the lamp.

A ferry to the islands began in 1976 with one sailing a day. It now makes six in summer and two in winter, and carries about ninety \
thousand people a year, most of them in July. The harbour master, whose office is in the old customs house, says that the noise of the \
ferry is the sound of a town that has found a use for its stones again."""

CHATS: dict[str, list[tuple[str, str]]] = {
    "capital": [("user", "What is the capital of France?")],
    "why_sky_blue": [("user", "Why is the sky blue? Explain it to a ten-year-old in two sentences.")],
    "boil_egg": [("user", "How long should I boil an egg so that the yolk stays soft?")],
    "water_cycle": [("user", "Name the stages of the water cycle.")],
    "fruit_list": [("user", "List five fruits that are red, one per line.")],
    "packing_list": [("user", "Write a packing list for a weekend of hiking in the rain. Use bullet points.")],
    "haiku": [("user", "Write a haiku about an empty train station.")],
    "rewrite_polite": [("user", "Rewrite this politely: Send me the report now, you are late again.")],
    "synonyms": [("user", "Give me three synonyms for 'quick'.")],
    "extract_json": [
        ("user", 'Extract the name, the date and the amount as JSON from: "Invoice 2231, 14 March 2024, Maria Lopez, total 48.50 EUR."')
    ],
    "extract_email": [("user", "Find the e-mail address in this text: Please write to Tom at tom.reed@example.org before Friday.")],
    "classify_billing": [("system", LABELS), ("user", "I was charged twice for the same month.")],
    "classify_delivery": [("system", LABELS), ("user", "My parcel has been sitting in the depot since Monday.")],
    "classify_fault": [("system", LABELS), ("user", "The lamp flickers and then goes out after a minute.")],
    "classify_praise": [("system", LABELS), ("user", "Thank you, the new chair is wonderful!")],
    "sentiment": [("user", "Is this review positive or negative? Answer with one word.\n\nThe soup was cold and the waiter rude.")],
    "addition": [("user", "What is 17 + 25?")],
    "word_problem": [("user", "A train leaves at 9:40 and arrives at 12:15. How long is the journey? Show your steps.")],
    "spaced_digits": [("user", "Add up the column:\n   12\n  305\n    7\n 1 000")],
    "percent": [("user", "What is 15% of 240?")],
    "python_function": [("user", "Write a Python function that returns the n-th Fibonacci number.")],
    "fix_bug": [
        (
            "user",
            "What is wrong with this code?\n\n```python\ndef mean(xs):\n    total = 0\n    for x in xs:\n        total =+ x\n    return total / len(xs)\n```",
        )
    ],
    "sql": [("user", "Write an SQL query that counts the orders of each customer in the table orders(customer_id, amount).")],
    "regex": [("user", "Explain the regular expression ^\\d{4}-\\d{2}-\\d{2}$")],
    "french": [("user", "Quelle est la capitale de l'Italie ? Réponds en une phrase.")],
    "german": [("user", "Erkläre in zwei Sätzen, warum Brot beim Backen aufgeht.")],
    "spanish": [("user", "¿Cuáles son los colores del arcoíris?")],
    "russian": [("user", "Как называется столица Японии?")],
    "chinese": [("user", "请用一句话介绍北京。")],
    "japanese": [("user", "日本で一番高い山は何ですか。")],
    "arabic": [("user", "ما هي عاصمة مصر؟")],
    "emoji": [("user", "What do these emoji mean? 🎉🥳👩‍👩‍👧‍👦 🇫🇷")],
    "translate": [("user", "Translate to French: The cat sleeps on the warm roof.")],
    "very_short": [("user", "Hi")],
    "one_mark": [("user", "?")],
    "pirate": [("system", "You are a pirate. Keep every answer under twenty words."), ("user", "How do I get to the library?")],
    "empty_system": [("system", ""), ("user", "Tell me a fact about owls.")],
    "two_turns": [
        ("user", "My name is Ada and I live in Oslo."),
        ("assistant", "Nice to meet you, Ada! How can I help you today?"),
        ("user", "Where do I live?"),
    ],
    "four_turns": [
        ("system", "You are a patient cooking teacher."),
        ("user", "I want to bake bread."),
        ("assistant", "Lovely! Do you have flour, water, yeast and salt?"),
        ("user", "Yes, 500 g of flour."),
        ("assistant", "Then take 320 g of water, 7 g of yeast and 10 g of salt."),
        ("user", "And how long does it rise?"),
    ],
    "odd_spaces": [("user", "  two  spaces,\ttab,\r\nline ends \n\n\nand   more   ")],
    "long_summary": [("user", f"Summarise this text in one sentence.\n\n{REPORT}")],
}

RAW: dict[str, str] = {
    "raw_one_letter": "A",
    "raw_one_word": "Hello",
    "raw_leading_space": " the",
    "raw_newline": "\n",
    "raw_once_upon": "Once upon a time, in a village by the sea, there lived",
    "raw_trailing_space": "The three primary colours are ",
    "raw_list": "Shopping list:\n1. Milk\n2. Bread\n3.",
    "raw_counting": "1, 2, 3, 4, 5, 6,",
    "raw_weekdays": "Monday, Tuesday, Wednesday,",
    "raw_python": "def is_prime(n):\n    ",
    "raw_html": '<!DOCTYPE html>\n<html lang="en">\n<head>\n  <title>',
    "raw_json": '{"city": "Paris", "country": "France"}\n{"city": "Rome", "country":',
    "raw_german": "Im Herbst fallen die Blätter von den Bäumen, weil",
    "raw_chinese": "从前有一座山，山里有",
    "raw_quotes": "“Don’t you think it’s late?” she asked — he shrugged… and said",
    "raw_decomposed": "Cafe\u0301 and café are",
    "raw_markup": "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n",
    "raw_report": f"{REPORT}\n\nQuestion: What did the dance hall use to be?\nAnswer: The dance hall used to be",
}
