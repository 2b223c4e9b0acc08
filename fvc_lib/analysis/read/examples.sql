-- Hardest fold: In which fold did the model rank worst, and how many groups is that said of?
SELECT run_id, scope, value AS roc_auc, num_videos, num_groups
FROM results
WHERE source = 'model' AND metric = 'roc_auc' AND scope LIKE 'fold_%'
ORDER BY roc_auc

-- Worst mistakes: Which videos was the model most sure of and wrong about?
SELECT p.run_id, p.fold, v.path, p.label, p.score, p.threshold, v.codec, v.platform
FROM predictions p JOIN videos v USING (run_id, video_id)
WHERE (p.score >= p.threshold) <> (p.label = 'fake')
ORDER BY abs(p.score - p.threshold) DESC
LIMIT 20

-- Errors by codec: How often is the model wrong about each codec, and of how many groups is that?
SELECT p.run_id, v.codec, p.label, count(*) AS num_videos, count(DISTINCT p.group_id) AS num_groups,
       avg(CAST((p.score >= p.threshold) <> (p.label = 'fake') AS INTEGER)) AS share_wrong
FROM predictions p JOIN videos v USING (run_id, video_id)
GROUP BY ALL
ORDER BY share_wrong DESC, num_videos DESC

-- Calibration: Of the videos scored about 0.7, are about 70 % fake?
SELECT run_id, floor(least(score, 0.999) * 10) / 10 AS score_from, count(*) AS num_videos,
       avg(score) AS mean_score, avg(CAST(label = 'fake' AS INTEGER)) AS share_fake
FROM predictions
GROUP BY ALL
ORDER BY run_id, score_from

-- Best epoch: At which epoch was each training's validation loss lowest, and what was its last?
SELECT run_id, stage, fold, arg_min(epoch, value) AS best_epoch, min(value) AS lowest_loss,
       arg_max(value, step) AS last_loss, max(epoch) AS last_epoch
FROM metrics
WHERE phase = 'validation' AND metric = 'loss'
GROUP BY run_id, stage, fold
ORDER BY run_id, stage, fold

-- What training chose: Which epoch, threshold and temperature did each training choose, and what did it cost?
SELECT run_id, stage, fold, trained, epochs, best_epoch, threshold, temperature, micro_batch, seconds,
       peak_rss_bytes / 1e9 AS peak_gb
FROM training
ORDER BY run_id, stage, fold, trained DESC

-- Where memory went: In which phase of which stage was most memory held?
SELECT run_id, stage, fold, phase, max(rss_mb) AS peak_rss_mb, max(allocated_mb) AS peak_allocated_mb,
       count(*) AS num_samples
FROM memory
GROUP BY ALL
ORDER BY peak_allocated_mb DESC NULLS LAST
LIMIT 20

-- Largest groups: Which groups hold the most videos? A fold cannot be smaller than its largest.
SELECT run_id, group_id, count(*) AS num_videos, count(DISTINCT label) AS num_labels, min(path) AS one_of_them
FROM videos
GROUP BY run_id, group_id
ORDER BY num_videos DESC, group_id
LIMIT 20

-- Left out: Why were listed videos or images not used?
SELECT run_id, reason, count(*) AS num_files, min(path) AS one_of_them
FROM rejected
GROUP BY run_id, reason
ORDER BY num_files DESC

-- Confused classes: Task image: which class is most often called which other one, and in how many groups?
SELECT run_id, class_label, predicted_label, count(*) AS num_images, count(DISTINCT group_id) AS num_groups,
       avg(probability) AS mean_probability
FROM image_predictions
WHERE class_label <> predicted_label
GROUP BY ALL
ORDER BY num_images DESC, class_label, predicted_label
LIMIT 20

-- Furthest off: Task image: for which images is a predicted number furthest off?
SELECT run_id, target, path, value, predicted, predicted - value AS off, unit
FROM target_predictions
QUALIFY row_number() OVER (PARTITION BY run_id, target ORDER BY abs(predicted - value) DESC) <= 5
ORDER BY run_id, target, abs(off) DESC

-- Found last: Task video_text: which queries find theirs last, and among how many?
WITH names AS (
    SELECT run_id, video_id AS query_id, min(path) AS query FROM video_texts GROUP BY ALL
    UNION ALL SELECT run_id, text_id, min(text) FROM video_texts GROUP BY ALL
)
SELECT r.run_id, r.direction, r.rank, r.num_candidates, r.num_positives, names.query
FROM retrieval_ranks r LEFT JOIN names USING (run_id, query_id)
ORDER BY r.rank / r.num_candidates DESC, r.query_id
LIMIT 20
