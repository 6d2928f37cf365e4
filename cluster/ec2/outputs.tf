output "inventory" {
  description = "What to give to `rapidraid-cluster run --on`"
  value       = local_file.inventory.filename
}

output "hosts" {
  description = "Public addresses, the client last"
  value       = aws_instance.host[*].public_ip
}
