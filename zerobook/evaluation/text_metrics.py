"""Metrics that compare generated texts with references: ROUGE, BLEU, chrF."""


def text_metrics(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Return scores from 0 to 100. Higher is closer.

    Args:
        predictions: one text each, at least one.
        references: one text each, in the same order.

    Returns:
        ``rouge1``, ``rouge2``, ``rougeL``: mean F-measure over the texts, English stems (package rouge-score; letters
        outside a-z and digits are dropped, so other scripts score 0). ``bleu``: corpus BLEU, up to 4-grams;
        ``chrf``: corpus chrF2, on characters, for any script (package sacrebleu, its default settings).

    >>> {name: round(score, 1) for name, score in text_metrics(["the cat sat"], ["the cat sits"]).items()}
    {'rouge1': 66.7, 'rouge2': 50.0, 'rougeL': 66.7, 'bleu': 0.0, 'chrf': 61.0}
    """
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    rouge_scores = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    scores = {}
    for name in names:
        scores[name] = 100 * sum(score[name].fmeasure for score in rouge_scores) / len(rouge_scores)
    scores["bleu"] = sacrebleu.corpus_bleu(predictions, [references]).score
    scores["chrf"] = sacrebleu.corpus_chrf(predictions, [references]).score
    return scores
