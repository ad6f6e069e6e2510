"""A generated text for tests: sentences of a small grammar."""

import random


def sample_text(num_sentences: int, seed: int = 0) -> str:
    """Sentences about animals and what they do; every word is of a fixed list."""
    draw = random.Random(seed)
    subjects, verbs, objects = ["the cat", "a dog", "my bird"], ["sees", "likes", "hunts"], ["fish", "mice", "the sun"]
    return "".join(
        f"{draw.choice(subjects).capitalize()} {draw.choice(verbs)} {draw.choice(objects)}.\n"
        for _ in range(num_sentences)
    )
