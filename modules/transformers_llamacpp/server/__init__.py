"""The page: FastAPI and Gradio are imported in this folder only."""
