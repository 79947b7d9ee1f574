"""Plain English and code that synthetic workloads are put together from, so that a model answers them as it would real prompts."""

from __future__ import annotations

SYSTEM_OPENINGS = (
    "You are the assistant of a small hardware shop. Answer in a friendly tone, and say so when you do not know.",
    "You are a careful editor. Keep the meaning of what you are given, and make every sentence shorter where you can.",
    "You help students with their homework. Explain each step, and never give the result without the way to it.",
    "You write for a regional newspaper. Prefer facts to opinions, name places and times, and avoid long words.",
)

QUESTIONS = (
    "Explain {topic} to somebody who has never heard of it, with one example from daily life.",
    "Write a short story in which {topic} plays the main part and everything ends well.",
    "What are the three most common mistakes that people make with {topic}, and how can they be avoided?",
    "Compare {topic} with {other}: what do they have in common, and where do they differ most?",
    "Draft a letter to the city council that asks for more money for {topic}.",
    "Give me a plan for a week in which I learn as much as possible about {topic}.",
    "Summarise the history of {topic} in a few paragraphs, from its beginnings to the present day.",
    "Write a dialogue between two friends, one of whom loves {topic} while the other prefers {other}.",
    "List ten facts about {topic}, each of them with a sentence that says why it matters.",
    "Imagine that {topic} did not exist. How would an ordinary day in a small town change?",
    "I have to give a talk about {topic} tomorrow. Write it for me, with a strong beginning.",
    "Describe how {topic} works, step by step, as if you wrote a manual for beginners.",
)

TOPICS = (
    "a sailing boat", "the post office", "bread baking", "the water cycle", "chess", "a railway station", "bees", "the violin",
    "public libraries", "mountain weather", "bicycles", "a vegetable garden", "lighthouses", "old maps", "electric light",
    "tea", "the moon", "wooden bridges", "market days", "glass making", "migrating birds", "a printing press", "river ferries",
    "clocks", "school holidays", "wind mills", "coral reefs", "pottery", "radio", "winter coats", "the telephone", "honey",
)  # fmt: skip

SENTENCES = (
    "The harbour lies at the end of a long road that follows the river down from the hills.",
    "Every morning the first ferry leaves at six, and the last one comes back shortly before midnight.",
    "In spring the fields along the canal are flooded for a few days, which keeps the soil fertile.",
    "Most of the houses were built by the people who live in them, with stone from the old quarry.",
    "The library keeps a copy of every newspaper that was printed in the county since the railway came.",
    "A good loaf needs four things only: flour, water, salt and time, and of these time is the hardest to find.",
    "When the wind turns to the north the fishermen mend their nets and wait for better days.",
    "Bees find their way home by the position of the sun, even when it stands behind a cloud.",
    "The committee decided to repair the bridge first and to talk about the new road next year.",
    "Anyone who borrows a tool signs the book by the door and brings it back before the end of the week.",
    "The teacher asked the class to measure the shadow of the flagpole at noon and again at three.",
    "On market days farmers bring apples, cheese and wool, and carry home lamp oil and news.",
    "The engine makes a steady sound as long as its filter is clean; a rattle means that it should be looked at.",
    "Nobody knows who drew the oldest map of the valley, but it shows three mills where there is one today.",
    "Water boils at a lower temperature on the mountain, so that beans take much longer to become soft.",
    "The clock in the tower is five minutes fast, and everybody in the village has learned to live with it.",
    "A letter to the coast takes two days, unless the pass is closed, and then it may take a month.",
    "The potter mixes two kinds of clay, because one of them gives strength and the other one colour.",
    "Many birds rest on the island for a night before they cross the open sea in one long flight.",
    "The station has a waiting room with a stove, a timetable on the wall and a cat that belongs to nobody.",
    "She wrote down every rainfall for forty years, and her notebooks are now used to plan new dams.",
    "The recipe is simple, but the order matters: the onions first, the tomatoes much later.",
    "Electric light came to the upper streets in one summer, and the lamplighter became a gardener.",
    "If the paint is to last, the wood must be dry, clean and a little rough before the first coat.",
    "The orchestra rehearses in the school hall, since its own roof has been leaking since the autumn.",
    "Customers may return what they bought within thirty days, provided that it was not used.",
    "The shop opens at eight on weekdays, at nine on Saturdays, and stays closed on Sundays and holidays.",
    "Prices include tax but not delivery, which depends on the weight of the parcel and on the distance.",
    "A damaged item is replaced at once when a photograph of it is sent within a week of its arrival.",
    "Orders above fifty pounds are delivered free of charge to any address that a lorry can reach.",
    "Questions about an invoice are answered by the accounts office, on Tuesdays and Thursdays only.",
    "The old road over the hill is shorter, but in winter it is closed more often than it is open.",
)

CODE = (
    '''def moving_average(values, width):
    """Return the mean of each run of `width` neighbouring values."""
    if width < 1:
        raise ValueError("width must be at least 1")
    result = []
    for start in range(len(values) - width + 1):
        window = values[start : start + width]
        result.append(sum(window) / width)
    return result
''',
    '''class Account:
    """A bank account that never goes below zero."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("balance is too low")
        self.balance = self.balance - amount
        return self.balance
''',
    '''def count_words(text):
    """Return how often each word occurs in the text."""
    counts = {}
    for line in text.splitlines():
        for word in line.split():
            word = word.strip(".,;:!?").lower()
            if word:
                counts[word] = counts.get(word, 0) + 1
    return counts
''',
    '''def merge(left, right):
    """Merge two sorted lists into one sorted list."""
    merged = []
    i = 0
    j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i = i + 1
        else:
            merged.append(right[j])
            j = j + 1
    merged.extend(left[i:])
    merged.extend(right[j:])
    return merged
''',
    """SELECT customers.name, customers.city, SUM(orders.amount) AS total
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.year = 2024 AND customers.city = 'Leeds'
GROUP BY customers.name, customers.city
ORDER BY total DESC
LIMIT 20;
""",
)
